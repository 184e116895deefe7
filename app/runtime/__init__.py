"""The life of a page: its refreshes, the moment that it shows, the verdict behind it."""
