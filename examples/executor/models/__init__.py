"""The models that the executor can load."""
