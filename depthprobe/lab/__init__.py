"""Small transformers of every norm placement, to train and to compare with everything else held equal."""
