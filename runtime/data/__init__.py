"""Problems and samples: where problems come from, how they become prompts, and the order of the prompts.

Level 3: imports ``runtime.system`` only and loads no model.
"""
