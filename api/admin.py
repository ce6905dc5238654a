"""What a key with the scope `admin` may ask under /admin."""

from fastapi import APIRouter

from api import admin_audit, admin_keys, admin_quotas, admin_tenants

router = APIRouter()
for module in (admin_tenants, admin_keys, admin_quotas, admin_audit):
    router.include_router(module.router)
