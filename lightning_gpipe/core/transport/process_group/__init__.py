"""Workers in several processes, connected by torch.distributed.

Worker, schedule and stage stay as they are: a thread for each other process puts the values that
come from it into the same inboxes.
"""
