"""Where bytes live and how they move; knows bytes, not models."""
