"""Findings about time that the training loses, and advice to gain it back."""
