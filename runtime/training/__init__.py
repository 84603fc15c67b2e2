"""Everything an update computes with: models and their files, batches, attention, DeepSpeed ZeRO, memory and sizes.

Level 4: imports ``runtime.arguments``, ``runtime.data`` and ``runtime.system``.
"""
