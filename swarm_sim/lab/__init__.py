"""The learning recipe as a laboratory: blocks, their controls and their end-to-end reference, trained by the node's own trainer.

spec.py says what one training is, variants.py what research changes in it, train.py does it, pool.py does many, cells.py says which ones a
question needs, scoring.py reads the results.
"""
