"""How many cases hypothesis draws: a few, always the same; in a soak many, always others."""

from hypothesis import HealthCheck, Phase, settings

# Cases are not made smaller in the suite: that takes longer than a test may.
settings.register_profile(
    "suite",
    max_examples=200,
    derandomize=True,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "soak", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")
