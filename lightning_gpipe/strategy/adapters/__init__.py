"""Parts of Lightning that assume one device per process, adapted while there is a pipeline.

Each module adapts one thing: callbacks that average, finetune or monitor, the profiler, the logs of
the LightningModule. After teardown all of it is as the user made it.
"""
