"""Types that engines and tasks exchange."""
