"""Other people's trainers: Hugging Face, Lightning.

It knows `core`, `show` and what they know; the trainer does not know it. Begin with
`lightning/engine.py`.
"""
