"""What readings, tables and charts show, for the command line, the screens and the report."""
