"""Workers in several processes, which connect to one another by TCP.

A process connects to its neighbours in a tree at once, and to those that it exchanges values with
when it first does. A thread for each connection puts what comes into the workers' inboxes.
torch.distributed gives the store where processes find one another, and NCCL between GPUs.
"""
