"""Autoencoders that tests have decoded and encoded in bands, against the whole, on 2, 3 and 4 ranks."""

TESTED = frozenset(
    {
        "AsymmetricAutoencoderKL",
        "AutoencoderDC",
        "AutoencoderKL",
        "AutoencoderKLCogVideoX",
        "AutoencoderKLCosmos",
        "AutoencoderKLFlux2",
        "AutoencoderKLHunyuanImage",
        "AutoencoderKLHunyuanImageRefiner",
        "AutoencoderKLHunyuanVideo",
        "AutoencoderKLHunyuanVideo15",
        "AutoencoderKLKVAE",
        "AutoencoderKLKVAEVideo",
        "AutoencoderKLLTX2Video",
        "AutoencoderKLLTXVideo",
        "AutoencoderKLMagvit",
        "AutoencoderKLMochi",
        "AutoencoderKLQwenImage",
        "AutoencoderKLQwenImage21",
        "AutoencoderKLTemporalDecoder",
        "AutoencoderKLWan",
        "AutoencoderTiny",
    }
)
