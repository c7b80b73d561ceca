class ServerPipeline:
    pass
