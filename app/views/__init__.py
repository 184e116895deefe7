"""One file per view: which figures, in which order, with which words."""
