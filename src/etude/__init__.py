"""étude trains a coding model inside the product that will use it."""

__version__ = "0.1.0"
