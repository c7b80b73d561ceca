"""Pipelines of diffusers' own tests that have a transformer, and calls that training refuses, with a word of why."""

# By class, of diffusers' repository at 58eb52c0803e: `pipeline_class` of its tests, without modular pipelines.
NAMES = """
AceStep Allegro AnyFlowFAR AnyFlow AuraFlow BriaFiboEdit BriaFibo Bria ChromaImg2Img Chroma ChronoEdit
CogVideoXFunControl CogVideoXImageToVideo CogVideoX CogVideoXVideoToVideo CogView3Plus CogView4 Cosmos2TextToImage
Cosmos2VideoToWorld Cosmos2_5_PredictBase Cosmos2_5_Transfer Cosmos3Omni CosmosTextToWorld CosmosVideoToWorld DiT
EasyAnimate Flux2KleinInpaint Flux2KleinKV Flux2Klein Flux2 FluxControlImg2Img FluxControlInpaint
FluxControlNetImg2Img FluxControlNetInpaint FluxControlNet FluxControl FluxFill FluxImg2Img FluxInpaint
FluxKontextInpaint FluxKontext Flux GlmImage Helios HiDreamImage HunyuanDiTControlNet HunyuanDiTPAG HunyuanDiT
HunyuanImage HunyuanSkyreelsImageToVideo HunyuanVideo15 HunyuanVideoFramepack HunyuanVideoImageToVideo HunyuanVideo
JoyImageEdit JoyImageEditPlus Kandinsky5I2I Kandinsky5I2V Kandinsky5T2I Kandinsky5T2V Krea2 LTX2Condition LTX2HDR
LTX2ImageToVideo LTX2InContext LTX2 LTXCondition LTXImageToVideo LTX Latte LongCatAudioDiT Lumina2 Lumina Mochi
MotifVideoImage2Video MotifVideo NucleusMoEImage OmniGen OvisImage PRX PRXPixel PixArtAlpha PixArtSigmaPAG PixArtSigma
QwenImageControlNet QwenImageEdit QwenImageEditPlus QwenImageImg2Img QwenImageInpaint QwenImage SanaControlNet
SanaImageToVideo SanaPAG Sana SanaSprintImg2Img SanaSprint SanaVideo SkyReelsV2DiffusionForcingImageToVideo
SkyReelsV2DiffusionForcing SkyReelsV2DiffusionForcingVideoToVideo SkyReelsV2ImageToVideo SkyReelsV2 StableAudio3
StableAudio StableDiffusion3ControlNetInpainting StableDiffusion3ControlNet StableDiffusion3Img2Img
StableDiffusion3Inpaint StableDiffusion3PAGImg2Img StableDiffusion3PAG StableDiffusion3 VisualClozeGeneration
VisualCloze WanAnimate WanImageToVideo Wan WanVACE WanVideoToVideo ZImageImg2Img ZImageInpaint ZImage
"""
UPSTREAM = [f"{name}Pipeline" for name in NAMES.split()]
# At least so many of them are derived.
LEAST = 108

# What the sentence says, and names of exams.
REFUSALS: dict[str, tuple[str, ...]] = {
    "its call fails": (
        "Flux2KleinKVPipeline pictures",
        "OmniGenPipeline pictures",
        "QwenImage21Pipeline no cache",
        "QwenImage21Pipeline",
        "LTXI2VLongMultiPromptPipeline",
        "LTX2DFRPipeline",
        "LTX2DFRTemporalRefinePipeline",
        "AnyFlowFARPipeline",
        "HeliosPyramidPipeline",
        "SanaSprintPipeline",
        "SanaSprintImg2ImgPipeline",
        "Ideogram4Pipeline",
    ),
    "the autoencoder decodes 2 latents": ("QwenImageLayeredPipeline",),
    "it takes no prompt": ("VisualClozePipeline", "VisualClozeGenerationPipeline", "Kandinsky6SRPipeline"),
    "holds given numbers that change from step to step": (
        "HunyuanImageRefinerPipeline",
        "WanVACEPipeline reference",
        "WanAnimatePipeline",
        "WanAnimatePipeline replace",
        "LTXConditionPipeline",
        "LTX2ConditionPipeline",
        "SkyReelsV2DiffusionForcingPipeline long",
        "SkyReelsV2DiffusionForcingVideoToVideoPipeline",
        "CosmosVideoToWorldPipeline",
        "Kandinsky5I2VPipeline",
        "Cosmos3OmniPipeline",
    ),
    "parts of the sample are at different times": ("SkyReelsV2DiffusionForcingPipeline asynchronous",),
    "several arguments depend on the sample": ("Cosmos2_5_TransferPipeline",),
    "is no straight function": ("Kandinsky6TI2VAPipeline image", "Kandinsky6TI2VAPipeline"),
    "is called": ("GlmImagePipeline image",),
    "no autoencoder decodes": ("PRXPixelPipeline",),
    "is not a linear function": ("AmusedPipeline",),
}
REFUSED = {name: sentence for sentence, names in REFUSALS.items() for name in names}
