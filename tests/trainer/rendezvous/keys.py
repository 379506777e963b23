"""The exchange key of the tests."""

from kdist_trainer.rendezvous.exchange import ExchangeKey

KEY_TEXT = "test" * 8
KEY = ExchangeKey(KEY_TEXT.encode)
