"""A decoder-only language model written for graph mode, small enough to read in one sitting and to copy from."""
