"""Score code and its form as AReaL does with check_xml_format: 1 right, -0.8 wrong in the right form, -1 the rest.

--verifier examples/code_in_form.py:code_in_form --non_stop_penalty 1
"""

from rewards import Reward, code, format_


def code_in_form(response, truth, row):
    correct = code(response, truth, row).score
    form = format_(response, truth, row).score
    score = 1.0 if correct else -0.8 if form else -1.0
    return Reward(score, {"correct": correct, "format": form})
