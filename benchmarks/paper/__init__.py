"""The paper's Figure 1 and Table 2 on open speech: objf and WER by number of jobs, with and without
natural gradient.
"""
