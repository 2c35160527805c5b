"""What the verbs do, as functions of the package."""
