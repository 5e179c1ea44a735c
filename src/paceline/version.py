"""WHICH paceline is this? The one place that says."""

VERSION = "0.1.0"
