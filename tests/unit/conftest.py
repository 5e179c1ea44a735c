"""Generated examples are the same in every run and take as long as they take: two cores are shared by many tests."""

from hypothesis import settings

settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")
