"""Replicas of a pipeline, and the processes of one stage: equal values, and divided ones."""
