"""Finds layers that the table of families lacks by structure; compares them on random inputs."""
