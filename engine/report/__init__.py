"""Runs for people: tables and charts of commands, screens and pages, figures for papers, copies to other services."""
