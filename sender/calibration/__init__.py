"""What methods need to know about a model beforehand, and where it is kept."""
