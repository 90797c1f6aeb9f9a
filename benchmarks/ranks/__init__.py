"""Several ranks: the loop against a loop written by hand."""
