"""Layers that the table of families lacks: found by their structure, compared on random inputs."""
