"""Configuration: the schema, the layers that resolve to a config, and its validation."""
