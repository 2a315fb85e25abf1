"""The version of the package, which a checkout that is not installed knows too."""

__version__ = "0.1.0"
