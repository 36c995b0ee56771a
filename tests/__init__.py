"""Test packages mirror the folders of the project."""
