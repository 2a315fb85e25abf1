"""Skip connections: tensors that go straight from the layer that makes them to one that uses them.

``declare`` is what a user writes, ``flight`` where tensors are between the two layers, ``layout``
the check of all declarations of a model and the routes between stages that follow from them.
"""
