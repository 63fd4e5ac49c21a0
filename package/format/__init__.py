"""The bytes of an artifact: its files and their limits, the manifest, JSON, tensors, records and the one-file form.

Nothing here knows machines, models or where an artifact lies; nothing imports torch before it makes tensors.
"""
