"""Facts that training needs of a pipeline, seen by running the unmodified pipeline a few steps with stand-ins."""
