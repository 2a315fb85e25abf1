"""Replicas of a pipeline, and the processes of one stage: equal values, and divided ones.

`replicas` keeps values the same, `gradient_averaging` averages gradients, `sharding` divides among
replicas, and `stage_shards` is for tensor parallelism.
"""
