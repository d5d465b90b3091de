"""The version of this Kedge, which stores and packs name as the one that wrote them."""

__version__ = "0.1.0"
