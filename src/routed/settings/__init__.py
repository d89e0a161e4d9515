"""Settings: how one is declared, and trees of them by dotted keys. Nothing here knows any part's name."""
