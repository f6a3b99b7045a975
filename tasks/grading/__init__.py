"""`reward`: run graders, in processes or outside."""
