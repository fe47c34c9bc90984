"""Fixtures of the tests of the host engine's driver half: the driver, and the current device."""

import ctypes

import pytest
from driver_calls import opened


@pytest.fixture(scope="module")
def driver():
    return opened()


@pytest.fixture(autouse=True)
def first_device(driver):
    driver.use(0)
    yield
    driver.use(0)
    driver.cuCtxSynchronize()


@pytest.fixture
def two_devices(driver):
    if driver.get("cuDeviceGetCount", ctypes.c_int) < 2:
        pytest.skip("needs two devices")
