"""Shared code of the estimators for all frameworks."""
