"""Workers in several processes, connected by torch.distributed.

A thread for each other process puts the values that come from it into the workers' inboxes.
"""
