from hypothesis import settings

settings.register_profile("assay", deadline=None, max_examples=80)
settings.load_profile("assay")
