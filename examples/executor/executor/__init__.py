"""A small offline executor in the manner of cann-recipes-infer: configuration, workers, and the loop around them."""
