from pathlib import Path

import pytest

from tune_model.pipeline.environment import read_environment


@pytest.mark.parametrize(
    ("variables", "cache"),
    [
        ({"XDG_CACHE_HOME": "/caches", "HOME": "/me"}, "/caches/tune-model"),
        ({"HOME": "/me"}, "/me/.cache/tune-model"),
        ({"XDG_CACHE_HOME": "", "HOME": "/me"}, "/me/.cache/tune-model"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/me"}, "/me/.cache/tune-model"),
    ],
)
def test_the_cache_follows_the_xdg_rules(variables, cache):
    assert read_environment(variables).cache_dir == Path(cache)


def test_a_user_without_home_still_has_a_cache():
    assert read_environment({}).cache_dir.is_absolute()
