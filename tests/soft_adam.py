"""Gives AdamW a large epsilon, so that gradients that are 0 up to rounding do not move weights by the learning rate.

For runs whose weights are compared up to rounding: --external_lib tests.soft_adam.
"""

import utils

utils.ADAM_EPS = 1e-3
