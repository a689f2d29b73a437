"""The configuration schema: YAML, command line, form and validation are derived from it."""
