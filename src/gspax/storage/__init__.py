"""Handles paths of the file system and of buckets, and the objects of a bucket."""
