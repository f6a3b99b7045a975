"""Grade samples: the step `reward`, and graders in processes or outside."""
