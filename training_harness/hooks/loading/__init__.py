"""Hooks around DataLoaders, in the training process and in workers."""
