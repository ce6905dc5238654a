
-- Quotas: what a tenant may still use, each question one atomic call. All of a tenant's keys share
-- a slot; the clock is the server's own.
--
-- bucket hash: tokens:MODEL    'LEVEL AT LIMIT', the tokens left at that millisecond, of so many
--              requests:MODEL  the same of requests
--              held:REQUEST    'MODEL TOKENS', what an open request reserved
-- leases zset: each open request by the millisecond at which its lease lapses

local BUCKET_LIFE_MS = 3600000
local MOST_LAPSED = 1000

local function clock_ms()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end

-- The level now, or nil if nothing is remembered.
local function level_of(bucket, field, limit, now)
  local level, at = string.match(redis.call('HGET', bucket, field) or '', '(%S+) (%S+)')
  if not level then return nil end
  return math.min(limit, level + math.max(0, now - at) * limit / 60000)
end

local function set_level(bucket, field, level, limit, now)
  redis.call('HSET', bucket, field, string.format('%.6f %d %d', level, now, limit))
end

-- Give back what a request reserved and did not use. Only the first to ask does.
local function give_back(bucket, leases, id, used, now)
  redis.call('ZREM', leases, id)
  local held = redis.call('HGET', bucket, 'held:' .. id)
  if not held then return 0 end
  redis.call('HDEL', bucket, 'held:' .. id)
  local model, reserved = string.match(held, '(%S+) (%S+)')
  local field = 'tokens:' .. model
  local limit = string.match(redis.call('HGET', bucket, field) or '', '%S+ %S+ (%S+)')
  if limit then
    limit = tonumber(limit)
    local level = level_of(bucket, field, limit, now)
    set_level(bucket, field, math.min(limit, level + reserved - used), limit, now)
  end
  return 1
end

-- Reserve tokens, one request and one place, or nothing.
-- keys: bucket, leases
-- args: request id, model, tokens, lease in ms, limits by minute of tokens and of requests, most at
--       once, tokens left and requests left if nothing is remembered; '' where there is none
-- Replies {word, ms to wait, tokens left, requests left, number open}: reserved; forgotten (say
-- what is left); concurrent, requests or tokens (what was lacking); too_large (never fits)
local function reserve(keys, args)
  local bucket, leases = keys[1], keys[2]
  local id, model, wanted, lease_ms = args[1], args[2], tonumber(args[3]), tonumber(args[4])
  local most_tokens, most_requests, most_open =
    tonumber(args[5]), tonumber(args[6]), tonumber(args[7])
  local now = clock_ms()
  for _, lapsed in ipairs(
      redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, MOST_LAPSED)) do
    give_back(bucket, leases, lapsed, 0, now)
  end
  local tokens = most_tokens and
    (level_of(bucket, 'tokens:' .. model, most_tokens, now) or tonumber(args[8]))
  local requests = most_requests and
    (level_of(bucket, 'requests:' .. model, most_requests, now) or tonumber(args[9]))
  local num_open = redis.call('ZCARD', leases)
  local function reply(word, wait_ms)
    return {word, math.ceil(wait_ms), math.floor(tokens or -1), math.floor(requests or -1), num_open}
  end
  if (most_tokens and not tokens) or (most_requests and not requests) then
    return reply('forgotten', 0)
  end
  if redis.call('ZSCORE', leases, id) then return reply('reserved', 0) end
  if most_tokens and wanted > most_tokens then return reply('too_large', 0) end
  if most_open and num_open >= most_open then return reply('concurrent', 0) end
  if requests and requests < 1 then
    return reply('requests', (1 - requests) * 60000 / most_requests)
  end
  if tokens and tokens < wanted then
    return reply('tokens', (wanted - tokens) * 60000 / most_tokens)
  end
  if tokens then
    tokens = tokens - wanted
    set_level(bucket, 'tokens:' .. model, tokens, most_tokens, now)
  end
  if requests then
    requests = requests - 1
    set_level(bucket, 'requests:' .. model, requests, most_requests, now)
  end
  redis.call('HSET', bucket, 'held:' .. id, model .. ' ' .. wanted)
  redis.call('ZADD', leases, now + lease_ms, id)
  num_open = num_open + 1
  redis.call('PEXPIRE', bucket, BUCKET_LIFE_MS)
  redis.call('PEXPIRE', leases, BUCKET_LIFE_MS)
  return reply('reserved', 0)
end

-- An open request has ended, having used so many tokens. Replies 1, or 0 if nothing was held.
-- keys: bucket, leases            args: request id, tokens used
local function release(keys, args)
  return give_back(keys[1], keys[2], args[1], tonumber(args[2]), clock_ms())
end

-- Keep the leases of open requests from lapsing.
-- keys: leases                    args: lease in ms, request ids
local function renew(keys, args)
  local until_ms = clock_ms() + args[1]
  for i = 2, #args do redis.call('ZADD', keys[1], 'XX', until_ms, args[i]) end
  return #args - 1
end

redis.register_function('headrace_reserve', reserve)
redis.register_function('headrace_release', release)
redis.register_function('headrace_renew', renew)
