"""Common to the estimators of all frameworks."""
